"""What is done for each action: one function each, from a `Call` to the answer's values under the names of EC2's model."""
