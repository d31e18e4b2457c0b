"""Messages as bytes: pure code between the core and a transport."""
