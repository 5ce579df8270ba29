"""Plans for machines that are not here: a model without memory on ranks without messages."""
