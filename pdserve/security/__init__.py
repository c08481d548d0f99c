"""Who may talk to whom: certificates of processes, keys of clients, and the account of what was refused."""
