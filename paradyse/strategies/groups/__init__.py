"""A block split into groups of heads or of MLP columns, and where their weights lie."""
