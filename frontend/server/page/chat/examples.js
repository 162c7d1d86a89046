// Questions to begin with, by what is known of the model.

const KINDS = [
  // The demo model has read Python's documentation, and nothing else.
  [({ root }) => root === "demo", ["What is the with statement?", "How does a for loop work?", "Explain list comprehensions"]],
  [({ root }) => /code|coder|starcoder/i.test(root), ["Write a function that finds the longest common prefix of two strings", "Explain what a race condition is, with an example", "Write a test for a function that parses dates"]],
  [({ root }) => /math/i.test(root), ["Prove that the square root of 2 is irrational", "Solve x² − 5x + 6 = 0 step by step", "What is the sum of the first 100 odd numbers?"]],
  [({ reasoning }) => reasoning, ["A bat and a ball cost 1.10 together; the bat costs 1 more than the ball. What does the ball cost?", "Plan a day in Lisbon with two children", "Which is larger, 9.9 or 9.11?"]],
];
const GENERAL = ["Explain photosynthesis to a ten-year-old", "Write a short story about a lighthouse", "What are three ways to learn a language faster?"];

/** Three questions that fit a model (ServedModel). */
export const examples = (model) => KINDS.find(([fits]) => fits(model))?.[1] ?? GENERAL;
