"""What a plan has to know about each kind of mixer: one protocol, one file for each kind."""
