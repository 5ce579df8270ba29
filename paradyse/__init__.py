"""ParaDySe: a torch.compile backend that picks a parallel strategy per block from the length at hand."""
