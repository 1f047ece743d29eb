"""What trainer and searcher have besides their loops: scores, evaluations, records, checkpoints."""
