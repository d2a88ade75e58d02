"""Where the tokens and sequences of a pack lie on the ranks: integers and index tensors."""
