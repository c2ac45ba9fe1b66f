"""What `shrinkpoint.checkpointer` is made of: the objects of a hand-written loop, and measurements on them."""
