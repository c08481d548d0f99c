"""Load generator and experiments behind `pdserve bench`: pdserve and servers of the OpenAI API, by one client.

Knows servers only through `targets.Target`, and of time only the client's own clock.
"""
