"""What an output must satisfy: a JSON Schema, a regular expression, a grammar or one of a list of strings."""
