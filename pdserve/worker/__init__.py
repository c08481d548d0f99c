"""What prefill and decode workers have in common apart from the engine: sessions, threads, registration, life."""
