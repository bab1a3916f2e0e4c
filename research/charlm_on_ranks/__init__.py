"""A character-level GPT on several ranks: the parts of the paper's method, one after the other."""
