"""Named dims of a graph, parts of it run at other sizes, and their compilation."""
