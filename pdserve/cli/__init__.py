"""The command line. `main` imports nothing but click until it knows which command is wanted."""
