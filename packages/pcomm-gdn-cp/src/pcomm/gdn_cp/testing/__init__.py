"""What tests of the mixers need, here and in other packages."""
