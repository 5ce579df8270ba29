"""One file for each strategy: how one block is computed in parallel."""
