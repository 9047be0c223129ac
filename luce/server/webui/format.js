/** Numbers as people read them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/**
 * @param {number | null | undefined} value
 * @param {number} [digits] behind the point
 */
export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit && value < 100 ? 1 : 0)}\u00a0${UNITS[unit]}`;
}

/** @param {number | null | undefined} share of 1 */
export function percent(share) {
  return share === null || share === undefined ? "–" : `${number(100 * share)}\u00a0%`;
}

/** @param {number | null | undefined} value seconds */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${number(1000 * value)}\u00a0ms` : `${number(value, 2)}\u00a0s`;
}
