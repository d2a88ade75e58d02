"""What a run is told in TOML and on the command line: keys, rules, and what they resolve to."""
