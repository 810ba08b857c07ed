"""Ways into models of other libraries. Each is a module to import by name; nothing here imports those libraries."""
