"""Study of a learning rate that is steered by what averaging the weights of a round gains."""
