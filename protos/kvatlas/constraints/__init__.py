"""What an output must satisfy (JSON Schema, regular expression, grammar, choices), compiled for a vocabulary."""
