// A copy button on every block of code. Prompts (>>> and ...) and printed output stay behind.
"use strict";

function codeWithoutPrompts(text) {
  const lines = text.replace(/\n$/, "").split("\n");
  const isSession = lines.some((line) => line.startsWith(">>> "));
  if (!isSession) return lines.join("\n");
  return lines
    .filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
    .map((line) => line.slice(4))
    .join("\n");
}

// Pages served without encryption have no clipboard object, and a browser may refuse to use it:
// then the text of a hidden field is copied.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // go on with the hidden field
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.style.position = "fixed";
  field.style.opacity = "0";
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight > pre")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      await copyText(codeWithoutPrompts(block.innerText));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.parentElement.append(button);
  }
});
