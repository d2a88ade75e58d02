"""What a kernel does to the memory of other ranks: words, accesses and barriers, in two forms."""
