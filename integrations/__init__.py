"""What a framework's callback needs of that framework, apart from the callback itself."""
