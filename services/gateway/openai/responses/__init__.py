"""OpenAI's Responses API: answers as items, kept so that they can be read and continued."""
