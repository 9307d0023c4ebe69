// What is wrong with the page as it is shown: appended to a copy of it by the test that opens it.
(() => {
  const faults = [];
  const numbers = (color) => (color.match(/[\d.]+/g) || []).map(Number);
  const luminance = (color) => {
    const [r, g, b] = numbers(color).map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      const parts = numbers(color);
      if (parts.length === 3 || parts[3] > 0) return color;
    }
    return null;
  };
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    if (frame.width < 100 || frame.height < 30) faults.push(`a plot of ${frame.width} by ${frame.height}`);
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      const inside =
        box.left >= frame.left - 1 && box.right <= frame.right + 1 && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
      if (!inside) faults.push(`outside of its plot: ${text.textContent}`);
    }
  }
  let read = 0;
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    // Text on a coloured bar has the bar behind it, which is no ancestor.
    const skipped = element.tagName === "SCRIPT" || [...element.classList].some((name) => name.startsWith("on-"));
    if (!own || skipped || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const [ink, paper] = [element.closest("svg") ? style.fill : style.color, background(element)];
    if (!paper) { faults.push("no background is set"); break; }
    const [a, b] = [luminance(ink), luminance(paper)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    read += 1;
    if (contrast < 3) faults.push(`hard to read, ${ink} on ${paper}: ${element.textContent.slice(0, 40)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth + 1) faults.push(`wider than the window: ${document.documentElement.scrollWidth}`);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.body.innerHTML = "";
  document.body.textContent = `FOUND ${JSON.stringify({ dark, read, faults })} END`;
})();
