"""The zoo: small real problems that finders are judged on, some of them held out."""
