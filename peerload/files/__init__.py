"""Files sent along with a task: manifest, blocks, reading at the source and writing at the destination."""
