// arithmatex writes an equation as text, \(...\) in a line or \[...\] in a block; KaTeX renders it.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
