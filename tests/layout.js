// Faults of the shown page's layout, as texts: overflow, text cut without a sign, elements one over the other.
() => {
  const faults = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...document.body.querySelectorAll("*")].filter((one) => shown(one) && clip(one).right > innerWidth + 1);
    faults.push(`the page is ${root.scrollWidth} wide: ${wide.slice(-3).map(called)}`);
  }

  function shown(one) {
    return one.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && !one.closest(".hidden-text");
  }
  function called(one) {
    const name = [one.tagName.toLowerCase(), ...one.classList].join(".");
    return `${name} “${(one.textContent || one.getAttribute("aria-label") || one.id || "").trim().slice(0, 50)}”`;
  }
  /** The part of an element, or of a line of its text, that the boxes around it let through. */
  function clip(one, line = null) {
    let { left, top, right, bottom } = line ?? one.getBoundingClientRect();
    for (let at = one; at && at !== document.body; at = at.parentElement) {
      const style = getComputedStyle(at);
      if ((line || at !== one) && style.overflowX !== "visible") {
        const edge = at.getBoundingClientRect();
        [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
        [top, bottom] = [Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
      }
      if (style.position === "fixed") break;
    }
    return { left, top, right, bottom, width: right - left, height: bottom - top };
  }

  // ------------------------------------------------------------------------------------------ text that is cut
  const lines = [];
  const cut = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const owner = node.parentElement;
    if (!node.data.trim() || !shown(owner) || owner.closest("option, noscript, script, style")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1) continue;
      for (let at = owner; at && at !== document.body; at = at.parentElement) {
        const style = getComputedStyle(at);
        if (style.position === "fixed") break;
        if (style.overflowX === "visible" && style.overflowY === "visible") continue;
        const edge = at.getBoundingClientRect();
        const aside = box.right > edge.right + 1 || box.left < edge.left - 1;
        const below = box.bottom - edge.bottom > box.height / 3 || edge.top - box.top > box.height / 3;
        if (!aside && !below) continue;
        if (signed(at, style, aside, below)) break;
        cut.add(at);
      }
      const seen = clip(owner, box);
      if (seen.width > 2 && seen.height > 2) lines.push({ owner, ...seen });
    }
  }
  /** Whether a box says that it holds more than it shows. */
  function signed(at, style, aside, below) {
    if (style.textOverflow === "ellipsis" || style.webkitLineClamp !== "none") return true;
    const scrolls = (how) => how === "auto" || how === "scroll";
    if (below && !aside) return scrolls(style.overflowY);
    return scrolls(style.overflowX) && (at.closest("[data-more]")?.dataset.more || style.backgroundAttachment.includes("local"));
  }
  for (const one of cut) faults.push(`cut without a sign: ${called(one)}`);
  const pen = document.createElement("canvas").getContext("2d");
  for (const field of document.querySelectorAll("input:not([type=range], [type=checkbox], [type=radio]), select")) {
    if (!shown(field)) continue;
    const style = getComputedStyle(field);
    pen.font = style.font;
    const text = field.selectedOptions?.[0]?.text ?? (field.value || field.placeholder);
    const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const arrow = field.tagName === "SELECT" ? 16 : 0;
    if (pen.measureText(text).width > room - arrow + 1 && style.textOverflow !== "ellipsis")
      faults.push(`cut without a sign: ${called(field)} ${text}`);
  }

  // ------------------------------------------------------------------------------------------ one over the other
  const OVER = ".token-card, dialog, .shell, .readout, .detail"; // in front of the rest by design
  const over = (one) => one.closest(OVER);
  const controls = [
    ...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']"),
  ].filter((one) => shown(one) && !one.matches(".skip, .text"));
  const crossed = (boxes, least, apart) => {
    boxes.sort((one, other) => one.top - other.top);
    boxes.forEach((one, i) => {
      for (let j = i + 1; j < boxes.length && boxes[j].top < one.bottom - least; j++) {
        const other = boxes[j];
        const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (wide < least || high < least || over(one.owner) !== over(other.owner) || !apart(one, other)) continue;
        faults.push(`overlap by ${wide.toFixed()} × ${high.toFixed()}: ${called(one.owner)} and ${called(other.owner)}`);
      }
    });
  };
  const nested = (one, other) => one.owner.contains(other.owner) || other.owner.contains(one.owner);
  crossed(
    controls.map((owner) => ({ owner, ...clip(owner) })).filter(({ width, height }) => width > 2 && height > 2),
    2,
    (one, other) => !nested(one, other),
  );
  const middles = lines.map((line) => ({ ...line, top: line.top + line.height / 4, bottom: line.bottom - line.height / 4 }));
  crossed(middles, 2, (one, other) => one.owner !== other.owner);

  // ------------------------------------------------------------------------------------------ charts in their cards
  for (const plot of document.querySelectorAll(".u-over, .plot-area svg, .curves svg, .map canvas, .charts figure > svg")) {
    if (!shown(plot)) continue;
    const card = plot.closest("figure, .map");
    const share = plot.getBoundingClientRect().width / card.getBoundingClientRect().width;
    if (share < 0.7) faults.push(`fills ${(100 * share).toFixed()}% of its card's width: ${called(card)}`);
  }
  // ------------------------------------------------------------------------------------------ type and space
  const rules = getComputedStyle(root);
  const pixels = (value) => parseFloat(value) * (value.endsWith("rem") ? parseFloat(rules.fontSize) : 1);
  const scale = (name) => {
    const steps = [];
    for (let n = 0; n < 10; n++) {
      const value = rules.getPropertyValue(`--${name}-${n}`).trim();
      if (value) steps.push(pixels(value));
    }
    return (value) => steps.some((step) => Math.abs(step - value) < 0.1);
  };
  const [isType, isSpace] = [scale("type"), scale("space")];
  const ofToken = ".t, .begins, small, svg *, .u-wrap *";
  for (const { owner } of lines) {
    const size = parseFloat(getComputedStyle(owner).fontSize);
    if (!isType(size) && !owner.matches(ofToken)) faults.push(`a size of its own, ${size}: ${called(owner)}`);
  }
  for (const box of document.querySelectorAll("main *")) {
    if (!shown(box) || box.children.length < 2) continue;
    const style = getComputedStyle(box);
    for (const gap of [style.rowGap, style.columnGap].map(parseFloat))
      if (gap > 8 && !isSpace(gap)) faults.push(`a gap of its own, ${gap}: ${called(box)}`);
  }
  return [...new Set(faults)].slice(0, 40);
}
