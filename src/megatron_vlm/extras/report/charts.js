// Draws each chart of the page with uPlot, whose legend shows the values under the pointer, else the last ones.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = value => {
    if (value == null) return "–";
    const rounded = Number(value.toPrecision(5));
    return rounded && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
  };
  const several = new Set(charts.flatMap(chart => chart.series.map(series => series.run))).size > 1;
  const places = [...document.querySelectorAll(".plot")];

  // One run has a colour for each metric. Of several runs each has a colour, and its metrics have dashes.
  function seriesOf(chart) {
    const drawn = {};
    return chart.series.map((series, number) => {
      const ofRun = drawn[series.run] = (drawn[series.run] ?? -1) + 1;
      const isSparse = series.values.filter(value => value != null).length <= 60;
      return { label: series.label, width: 1.5, spanGaps: true, points: { show: isSparse, size: 5 },
               stroke: () => colour(`--c${(several ? series.run : number) % 6}`),
               dash: several && ofRun ? [6, 3 * ofRun] : [], value: (_, value) => short(value) };
    });
  }

  const steps = [1, 2, 5].flatMap(n => [...Array(12).keys()].map(power => n * 10 ** power)).sort((a, b) => a - b);
  const range = (_, low, high) => low == null ? [0, 1] : low == high ? [Math.min(0, 2 * low), Math.max(0, 2 * high) || 1]
    : uPlot.rangeNum(low, high, .1, true);
  const showLast = plot => plot.cursor.left >= 0 || plot.setLegend({
    idxs: plot.data.map(values => values.findLastIndex(value => value != null)) }, false);

  const plots = charts.map((chart, number) => {
    const grid = { stroke: () => colour("--grid"), width: 1 };
    const axis = { stroke: () => colour("--text"), grid, ticks: grid };
    return new uPlot({
      width: places[number].clientWidth, height: 220, scales: { x: { time: false }, y: { range } },
      hooks: { ready: [showLast], setCursor: [showLast] },
      series: [{ label: "step" }, ...seriesOf(chart)],
      axes: [{ ...axis, incrs: steps }, { ...axis, size: 64, values: (_, ticks) => ticks.map(short) }],
    }, [chart.steps, ...chart.series.map(series => series.values)], places[number]);
  });
  addEventListener("resize", () => plots.forEach((plot, number) =>
    plot.setSize({ width: places[number].clientWidth, height: 220 })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    plots.forEach(plot => plot.redraw(false)));
})();
