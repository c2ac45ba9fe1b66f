"""The training state: tensors with roles, plain data, random generators; and consistent copies of them."""
