"""Solutions of MBPP tasks written from their sentence and asserts alone, without a look at the
references: what the differential tests must not refuse. The tasks are those that a shuffle of the
training split with seed 15 puts first, without four whose sentence does not say what is asked.
"""

# The references of these are wrong on inputs like those of their asserts: no rule can know that.
# They are kept here, so that the share of what is refused is not made to look better than it is.
WRONG_REFERENCES = ("MBPP/620", "MBPP/702")

SOLUTIONS = r"""
### 647
import re
def split_upperstring(text):
    return re.findall(r"[A-Z][^A-Z]*", text)
### 832
import re
def extract_max(input):
    return max(int(n) for n in re.findall(r"\d+", input))
### 698
def sort_dict_item(test_dict):
    return dict(sorted(test_dict.items(), key=lambda kv: kv[0][0] * kv[0][1]))
### 818
def lower_ctr(str):
    return sum(c.islower() for c in str)
### 750
def add_tuple(test_list, test_tup):
    return test_list + list(test_tup)
### 713
def check_valid(test_tup):
    return all(test_tup)
### 821
def merge_dictionaries(dict1, dict2):
    return {**dict2, **dict1}
### 603
def get_ludic(n):
    left = list(range(2, n + 1))
    found = [1]
    while left:
        k = left[0]
        found.append(k)
        left = [x for i, x in enumerate(left) if i % k]
    return found
### 937
from collections import Counter
def max_char(str1):
    return Counter(str1).most_common(1)[0][0]
### 712
def remove_duplicate(list1):
    out = []
    for x in sorted(list1):
        if x not in out:
            out.append(x)
    return out
### 822
import re
def pass_validity(p):
    return (6 <= len(p) <= 12 and bool(re.search("[a-z]", p)) and bool(re.search("[A-Z]", p))
            and bool(re.search("[0-9]", p)) and bool(re.search("[$#@]", p)))
### 729
def add_list(nums1, nums2):
    return [a + b for a, b in zip(nums1, nums2)]
### 607
def find_literals(text, pattern):
    at = text.find(pattern)
    return (pattern, at, at + len(pattern))
### 727
def remove_char(S):
    return "".join(c for c in S if c.isalnum())
### 973
def left_rotate(s, d):
    return s[d:] + s[:d]
### 941
def count_elim(num):
    count = 0
    for x in num:
        if type(x) is tuple:
            break
        count += 1
    return count
### 646
def No_of_cubes(N, K):
    return (N - K + 1) ** 3
### 764
def number_ctr(str):
    return sum(c.isdigit() for c in str)
### 914
def is_Two_Alter(s):
    return len(set(s)) == 2 and all(a != b for a, b in zip(s, s[1:]))
### 613
def maximum_value(test_list):
    return [(name, max(values)) for name, values in test_list]
### 965
import re
def camel_to_snake(text):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", text).lower()
### 624
def is_upper(string):
    return string.upper()
### 868
def length_Of_Last_Word(a):
    words = a.split()
    return len(words[-1]) if words else 0
### 722
def filter_data(students, h, w):
    return {k: v for k, v in students.items() if v[0] >= h and v[1] >= w}
### 649
def sum_Range_list(nums, m, n):
    return sum(nums[m:n + 1])
### 960
def get_noOfways(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
### 935
def series_sum(number):
    return sum(i * i for i in range(1, number + 1))
### 954
def profit_amount(actual_cost, sale_amount):
    if actual_cost > sale_amount:
        return actual_cost - sale_amount
### 635
def heap_sort(iterable):
    return sorted(iterable)
### 958
def int_to_roman(num):
    out = ""
    for value, sign in [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
                        (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]:
        while num >= value:
            out += sign
            num -= value
    return out
### 957
def get_First_Set_Bit_Pos(n):
    return (n & -n).bit_length()
### 926
from math import comb
def rencontres_number(n, m):
    d = [1, 0]
    for i in range(2, n + 1):
        d.append((i - 1) * (d[-1] + d[-2]))
    return comb(n, m) * d[n - m]
### 639
def sample_nam(sample_names):
    return sum(len(name) for name in sample_names if not name[0].islower())
### 893
def Extract(lst):
    return [row[-1] for row in lst]
### 709
def get_unique(test_list):
    keys = {}
    for key, value in test_list:
        keys.setdefault(value, set()).add(key)
    return str({value: len(found) for value, found in keys.items()})
### 877
def sort_String(str):
    return "".join(sorted(str))
### 737
def check_str(string):
    return "Valid" if string[:1].lower() in tuple("aeiou") else "Invalid"
### 848
def area_trapezium(base1, base2, height):
    return (base1 + base2) * height / 2
### 886
def sum_num(numbers):
    return sum(numbers) / len(numbers)
### 702
def removals(arr, n, k):
    arr = sorted(arr)
    best = max(sum(1 for y in arr if x <= y <= x + k) for x in arr)
    return len(arr) - best
### 928
def change_date_format(dt):
    y, m, d = dt.split("-")
    return f"{d}-{m}-{y}"
### 790
def even_position(nums):
    return all(x % 2 == 0 for x in nums[::2])
### 725
import re
def extract_quotation(text1):
    return re.findall(r'"([^"]*)"', text1)
### 866
def check_monthnumb(monthname2):
    return monthname2 in ("January", "March", "May", "July", "August", "October", "December")
### 671
def set_Right_most_Unset_Bit(n):
    for i in range(n.bit_length()):
        if not n >> i & 1:
            return n | 1 << i
    return n
### 654
def rectangle_perimeter(l, b):
    return 2 * (l + b)
### 959
def Average(lst):
    return sum(lst) / len(lst)
### 809
def check_smaller(test_tup1, test_tup2):
    return all(b < a for a, b in zip(test_tup1, test_tup2))
### 620
def largest_subset(a, n):
    a = sorted(a)
    best = [1] * len(a)
    for i in range(len(a)):
        for j in range(i):
            if a[i] % a[j] == 0:
                best[i] = max(best[i], best[j] + 1)
    return max(best)
### 754
def extract_index_list(l1, l2, l3):
    return [a for a, b, c in zip(l1, l2, l3) if a == b == c]
### 627
def find_First_Missing(array, start, end):
    have = set(array[start:end + 1])
    n = 0
    while n in have:
        n += 1
    return n
### 920
def remove_tuple(test_list):
    return str([t for t in test_list if any(x is not None for x in t)])
### 612
def merge(lst):
    return [list(column) for column in zip(*lst)]
### 669
def check_IP(Ip):
    parts = Ip.split(".")
    good = len(parts) == 4 and all(p.isdigit() and len(p) <= 3 and int(p) <= 255 for p in parts)
    return "Valid IP address" if good else "Invalid IP address"
### 824
def remove_even(l):
    return [x for x in l if x % 2]
### 739
def find_Index(n):
    i = 1
    while len(str(i * (i + 1) // 2)) < n:
        i += 1
    return i
### 796
def return_sum(dict):
    return sum(dict.values())
### 621
def increment_numerics(test_list, K):
    return [str(int(s) + K) if s.isdigit() else s for s in test_list]
### 668
import re
def replace(string, char):
    return re.sub(re.escape(char) + "+", char, string)
### 814
def rombus_area(p, q):
    return p * q / 2
### 666
def count_char(string, char):
    return string.count(char)
### 614
def cummulative_sum(test_list):
    return sum(sum(t) for t in test_list)
### 955
def is_abundant(n):
    return sum(d for d in range(1, n // 2 + 1) if n % d == 0) > n
### 797
def sum_in_Range(l, r):
    return sum(x for x in range(l, r + 1) if x % 2)
### 696
def zip_list(list1, list2):
    return [a + b for a, b in zip(list1, list2)]
### 860
def check_alphanumeric(string):
    return "Accept" if string[-1:].isalnum() else "Discard"
### 895
def max_sum_subseq(A):
    take, skip = 0, 0
    for x in A:
        take, skip = skip + x, max(take, skip)
    return max(take, skip)
### 611
def max_of_nth(test_list, N):
    return max(t[N] for t in test_list)
### 667
def Check_Vow(string, vowels):
    return sum(c in vowels for c in string)
### 924
def max_of_two(x, y):
    return x if x > y else y
### 674
def remove_duplicate(string):
    return " ".join(dict.fromkeys(string.split()))
### 770
def odd_Num_Sum(n):
    return sum((2 * i + 1) ** 4 for i in range(n))
### 901
from math import lcm
def smallest_multiple(n):
    return lcm(*range(1, n + 1))
### 943
import heapq
def combine_lists(num1, num2):
    return list(heapq.merge(num1, num2))
### 767
from itertools import combinations
def get_Pairs_Count(arr, n, sum):
    return len([1 for a, b in combinations(arr, 2) if a + b == sum])
### 909
def previous_palindrome(num):
    n = num - 1
    while str(n) != str(n)[::-1]:
        n -= 1
    return n
### 794
def text_starta_endb(text):
    import re
    return "Found a match!" if re.search("^a.*b$", text) else "Not matched!"
### 962
def sum_Even(l, r):
    return sum(range(l + l % 2, r + 1, 2))
### 817
def div_of_nums(nums, m, n):
    return [x for x in nums if x % m == 0 or x % n == 0]
### 693
def remove_multiple_spaces(text1):
    return " ".join(text1.split())
"""


def solutions() -> dict[str, str]:
    """Id of an MBPP task -> text of a solution."""
    parts = (part.split("\n", 1) for part in SOLUTIONS.split("### ")[1:])
    return {f"MBPP/{number}": text for number, text in parts}
