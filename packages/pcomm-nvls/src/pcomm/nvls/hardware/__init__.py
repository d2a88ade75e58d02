"""What one rank can do: facts about its device, and where they come from."""
