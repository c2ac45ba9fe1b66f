"""What a checkpoint holds: tensors with roles, plain data, generators; and consistent copies of them."""
