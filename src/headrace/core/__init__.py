"""The vocabulary every room shares. Imports nothing else of Headrace."""
