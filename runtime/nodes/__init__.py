"""How do searchers on other machines take part (--ray)?"""
