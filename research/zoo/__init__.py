"""The zoo: small real problems that finders are judged on, half of them held out before any tuning."""
