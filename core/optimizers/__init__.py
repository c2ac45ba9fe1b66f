"""What an optimizer's state is, and what a restored one does to the next updates."""
