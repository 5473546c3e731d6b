"""The search: it proposes, evaluates, confirms and selects configurations, and stores results."""
