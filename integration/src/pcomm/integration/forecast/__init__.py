"""What a run will need: counted on one process without memory, before any rank is started."""
