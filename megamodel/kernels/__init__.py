"""Operations in more than one form: a definition in plain torch, faster forms, and one place that chooses."""
