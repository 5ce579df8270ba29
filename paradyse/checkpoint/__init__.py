"""Files: save and load a run, read safetensors into shards."""
