"""What turns texts into vectors. Each is imported by its own module, with the packages it needs."""
