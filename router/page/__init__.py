"""The live page that a router serves at `/dashboard`: its files, its few endpoints, and the buttons of demo mode."""
