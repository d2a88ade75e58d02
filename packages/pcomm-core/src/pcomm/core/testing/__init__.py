"""What tests of communicating code need; part of the wheel, so that users have it too."""
