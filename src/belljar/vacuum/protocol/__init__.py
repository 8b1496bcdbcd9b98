"""VacQuery: what factories ask and tell each other by UDP."""
