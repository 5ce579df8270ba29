"""One captured graph and one call of it: capture, program, frame, guard."""
