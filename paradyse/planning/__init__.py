"""What a plan costs and which one to take."""
