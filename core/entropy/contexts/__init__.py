"""The context coder of planes of levels."""
