"""How far a step is from the limit of the machine's memory, and where the host's time goes."""
