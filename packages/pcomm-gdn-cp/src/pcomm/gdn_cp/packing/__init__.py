"""How the message of an all-to-all is put together and taken apart, by torch or by Triton."""
