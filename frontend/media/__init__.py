"""Pictures and sounds in prompts: from URLs, files and Python objects to decoded content, safely."""
