// Texts that are pale, clipped, or on top of one another, and charts with hardly a tick.
() => {
  const wrong = [], texts = [];
  const rgb = c => (c.match(/[\d.]+/g) || []).map(Number);
  const light = c => {
    const linear = v => (v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb(c).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  const hidden = e => {
    for (; e && e.nodeType === 1; e = e.parentElement) {
      const s = getComputedStyle(e);
      if (s.visibility === "hidden" || s.display === "none" || s.opacity === "0") return true;
    }
    return false;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const parent = node.parentElement, text = node.textContent.trim();
    if (!text || ["SCRIPT", "STYLE", "TITLE"].includes(parent.tagName.toUpperCase()) || hidden(parent)) continue;
    const svg = parent.closest("svg"), range = document.createRange();
    range.selectNodeContents(node);
    const colour = getComputedStyle(parent)[svg ? "fill" : "color"];
    const [a, b] = [light(colour), light(paper)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4) wrong.push(`pale: ${text} (${colour} on ${paper})`);
    const scroller = parent.closest(".wide");
    for (const box of svg ? [parent.getBoundingClientRect()] : range.getClientRects()) {
      if (box.width < 1) continue;
      texts.push({ text: text.slice(0, 60), box });
      const room = svg ? svg.getBoundingClientRect() : { left: 0, right: innerWidth, top: 0, bottom: 1e9 };
      const sides = box.left < room.left - 1 || box.right > room.right + 1;
      if ((sides && !scroller) || box.top < room.top - 1 || box.bottom > room.bottom + 1)
        wrong.push(`clipped: ${text} at ${Math.round(box.left)}..${Math.round(box.right)}`);
    }
  }
  texts.sort((a, b) => a.box.top - b.box.top);
  texts.forEach((one, i) => {
    for (const other of texts.slice(i + 1)) {
      if (other.box.top > one.box.bottom - 3) break;
      if (Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left) > 1)
        wrong.push(`overlap: ${one.text} and ${other.text}`);
    }
  });
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("wider than the window");
  for (const chart of document.querySelectorAll(".chart")) {
    const labels = chart.querySelectorAll(".role-axis-label text");
    if ([...labels].filter(e => !hidden(e)).length < 3) wrong.push(`few ticks: ${chart.id}`);
  }
  return wrong;
}
